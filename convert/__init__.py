"""Hugging Face safetensors to one GGUF: checkpoint, family, precision, plan, pipeline."""
