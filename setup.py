"""Compiles the kernels for the CPU, where there is a compiler; everything else is in pyproject.toml."""

from setuptools import Extension, setup

# Without Python's headers, so that a compiler is all it takes. Without one, or with one that does not know GCC's
# vectors, the package is installed without the kernels (optional).
kernels = Extension(
    "lightning_safusion.native._kernels",
    ["lightning_safusion/native/kernels.c"],
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-strict-aliasing"],
    optional=True,
)

setup(ext_modules=[kernels])
