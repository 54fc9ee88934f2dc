"""Language models behind one small interface: forward, length, rollback.

`TableModel` is a toy whose probabilities are written down; `CausalLM` is any transformers model whose cache can be
rolled back. Models know caches, devices and dtypes; they know nothing of drafting or acceptance.
"""

from specnb.models.base import LanguageModel, Scores, check_same_vocabulary
from specnb.models.causal import DTYPES, CausalLM, available_device, default_dtype
from specnb.models.pair import default_target, load_pair
from specnb.models.table import TableModel
