"""Goodness of fit: do sampled counts match a law, and would the test have seen it if they did not?

It knows counts and probabilities. It does not know torch, models or where the counts came from. Read notebook 04
beside it, and `specnb.audit.battery` next: many tests of one sampler at once.
"""

from specnb.gof.cells import rare_cells
from specnb.gof.power import draws_for_total_variation, exact_power, sample_size, smallest_total_variation
from specnb.gof.tests import GofResult, cannot_test, chi_square, result_of, two_sample
