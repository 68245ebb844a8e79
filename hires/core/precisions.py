"""Names the precisions, and the type in which each computes: another one is an entry here."""

from __future__ import annotations

PRECISIONS = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "float32",
}
"""Name -> the type of what a network computes, the most exact first. ``tf32`` holds fp32 numbers,
whose matrix products a GPU computes with 10 bits of each factor. ``int8`` computes with 8-bit
integers what it can, and the rest in fp32."""

INT8 = "int8"

HALF = ("fp16", "bf16")
"""To these autocast lowers matrix products; weights that are learned stay fp32."""

CPU_FLAGS = {
    "fp16": ("avx512_fp16", "amx_fp16"),
    "bf16": ("avx512_bf16", "amx_bf16"),
    INT8: ("avx512_vnni", "avx_vnni", "amx_int8"),
}
"""Precision -> flags of /proc/cpuinfo: a CPU with one of them multiplies such numbers itself."""

SIGNIFICANT_BITS = {"fp64": 53, "fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8, INT8: 8}
"""Bits of a factor in a matrix product, the hidden one included: a number is rounded by at most
2 ** -bits of itself."""
