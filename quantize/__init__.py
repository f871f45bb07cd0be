"""Quantizing to ggml's types: our own encoders with SIMD, ggml, and llama.cpp's own quantizer."""
