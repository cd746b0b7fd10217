"""What is done to every element: compiled C on the CPU (``cpu``), Triton on CUDA devices (``cuda``)."""
