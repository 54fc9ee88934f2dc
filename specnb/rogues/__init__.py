"""A gallery of wrong samplers, and of some that look wrong and are not.

A test of exactness is worth something if it rejects the wrong ones and passes the innocents. Read `specnb.exact` first.
"""

from specnb.rogues.base import Rogue, example_draft, example_target, sampler_of
from specnb.rogues.gallery import INNOCENTS, ROGUES, one_hot, top_k, top_p
