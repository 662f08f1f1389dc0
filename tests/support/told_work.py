"""Instructions of an HLO text that take a told time on a v5e: their vector units add numbers."""

import re

START = 1.2e-6  # seconds of each instruction on arrays
_PER_SECOND = 4 * 8 * 128 * 1.5e9  # the scaling book's 4096 operations a cycle, at 1.5 GHz


def with_work(text: str) -> str:
    """The text with the computations ``work_N`` that its fusions call, ``f32[8] → f32[8]``.

    Such a fusion takes N microseconds.
    """
    header, _, rest = text.partition("\n")
    called = sorted(set(map(int, re.findall(r"calls=%work_(\d+)", text))))
    return "\n".join([header, *map(_work, called), rest])


def _work(microseconds: int) -> str:
    count = round((microseconds * 1e-6 - START) * _PER_SECOND / 8)
    return f"""%work_{microseconds} (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  %many = f32[8,{count}] broadcast(%p), dimensions={{0}}
  %sums = f32[8,{count}] add(%many, %many)
  ROOT %some = f32[8] slice(%sums), slice={{[0:8], [0:1]}}
}}"""
