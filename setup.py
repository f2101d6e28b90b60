"""What pyproject.toml cannot say: an optional native kernel (numpy serves where no C compiler is).

It knows nothing of Python, being loaded by ctypes; so one wheel serves every Python from 3.11 on (`abi3`).
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
