"""The acceptance rule in exact fractions, by enumeration.

It knows a target and a draft as functions from a prefix (a tuple of ids) to a list of `Fraction`s. It does not know
torch, sampling or rounding: what it returns can be compared with `==`. Read `specnb.rule` beside it.
"""

from specnb.exact.rounds import TOKEN_RULE, Outcome, accepted_law, cut_at, generation_law, round_law, rule_of
from specnb.exact.rows import accept_prob, first_tokens, residual, sequence_law, step_law
