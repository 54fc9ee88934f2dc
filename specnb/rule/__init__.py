"""Acceptance rules on probability vectors.

`token` is the rule of Leviathan et al. 2023 (arXiv 2211.17192): each draft is judged by itself. A rule knows
probabilities, draft ids and uniforms; it knows no logits and no models. Read `specnb.exact` beside it.
"""

from specnb.rule.draws import Verdict, inverse_cdf
from specnb.rule.token import accept_probs, residual, verify, verify_unchecked
