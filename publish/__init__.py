"""From a checkpoint to a published repository of GGUFs: plan, conversion, card, upload."""
