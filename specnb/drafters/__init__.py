"""Where drafts come from, one file a kind: a model, prompt lookup, the first of several, yours.

A drafter proposes tokens and says with which probabilities it drew them. It does not know acceptance.
"""

from specnb.drafters.base import Draft, Drafter
from specnb.drafters.first_of import FirstOf
from specnb.drafters.lookup import PromptLookup
from specnb.drafters.model import ModelDrafter
