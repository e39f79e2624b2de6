"""Each family that runs on the CPU answers alike, split and unsplit, to the last bit, in eager mode.

The tests are those of DeepSeek-V2, run on servers of each family in turn: see `conftest`.
"""

import pytest

from tests.e2e.test_split_equals_unsplit import (
    test_concurrent_requests,
    test_each_role_holds_its_part,
    test_ffn_depends_on_what_it_is_sent,
    test_generation_crosses_a_block,
    test_logprobs_requested,
    test_prompt_longer_than_a_block,
    test_request_to_the_ffn_is_refused,
    test_single_requests,
    test_two_samples,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]

__all__ = [
    "test_concurrent_requests",
    "test_each_role_holds_its_part",
    "test_ffn_depends_on_what_it_is_sent",
    "test_generation_crosses_a_block",
    "test_logprobs_requested",
    "test_prompt_longer_than_a_block",
    "test_request_to_the_ffn_is_refused",
    "test_single_requests",
    "test_two_samples",
]
