"""Read and write files of tensors: GGUF, safetensors and PyTorch's."""
