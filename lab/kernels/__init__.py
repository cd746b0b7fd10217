"""What GPU compilers make of the Triton kernels, by version of Triton."""
