"""The one thing pyproject.toml cannot say: an optional native kernel (numba serves where no C compiler is)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "deltashard_checkpoint.codecs._native",
            ["checkpoint/deltashard_checkpoint/codecs/_native.c"],
            extra_compile_args=["-O3", "-fno-math-errno", "-ffp-contract=off", "-std=gnu11"],
            libraries=["m"],
            optional=True,
        )
    ]
)
