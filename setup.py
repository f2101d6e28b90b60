"""Builds the optional native kernel, which pyproject.toml cannot declare; without a C compiler numpy is used.

ctypes loads the kernel, which does not use Python's C API, so one wheel serves Python 3.11 and later (`abi3`).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "deltashard_checkpoint.codecs._native",
            ["checkpoint/deltashard_checkpoint/codecs/_native.c"],
            extra_compile_args=["-O3", "-fno-math-errno", "-ffp-contract=off", "-std=gnu11"],
            libraries=["m"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
