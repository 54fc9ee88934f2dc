"""Is another engine lossless? Greedy ids compared, transformers' sampled law tested, its drafts held to their contract.

An audit knows what an engine returns and what it should return, and feeds `specnb.gof`. It does not know how the engine
works. `specnb.serving.audit` does the same over HTTP.
"""

from specnb.audit.greedy import ROUNDING_ULPS, compare_greedy, margin_in_ulps, teacher_forced
from specnb.audit.report import LEVEL, PASSES, POWER, Report, report_of
