"""Take the MTP head from another model, and measure it."""
