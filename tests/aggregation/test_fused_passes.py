"""The fused GPU passes of the tally give what the plain implementation gives: here by triton's interpreter."""

from interpreted import check_cases, needs_triton


@needs_triton
def test_the_fused_passes_give_the_plain_sums_means_and_masks_in_the_interpreter():
    check_cases("tally_cases")
