"""The loaded libraries: layouts of structs, kernels, devices, and what they allow."""
