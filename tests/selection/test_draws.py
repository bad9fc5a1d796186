import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemrl.selection import draws

INT64 = st.integers(-(2**63), 2**63 - 1)
# The first outputs of the published SplitMix64 for seed 1234567.
REFERENCE = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_uniforms_are_the_top_bits_of_published_splitmix64() -> None:
    keys = torch.full((5,), 1234567)
    got = draws.uniforms(keys, torch.arange(5))
    assert got.tolist() == [output // 2**11 / 2**53 for output in REFERENCE]


def test_mix64_of_one_word_is_published_splitmix64() -> None:
    assert draws.mix64(1234567) % 2**64 == REFERENCE[0]
    assert draws.mix64(1234567 + 2**64) % 2**64 == REFERENCE[0]


@given(st.lists(INT64, min_size=1, max_size=6), st.lists(INT64, max_size=3))
def test_python_and_torch_agree(keys: list[int], words: list[int]) -> None:
    assert draws.mix(torch.tensor(keys), *words).tolist() == [draws.mix64(key, *words) for key in keys]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_same_bits() -> None:
    keys, counters = torch.arange(-5000, 5000), torch.arange(10000)
    on_gpu = draws.uniforms(draws.stream(keys.cuda(), draws.SELECTION), counters.cuda()).cpu()
    assert torch.equal(on_gpu, draws.uniforms(draws.stream(keys, draws.SELECTION), counters))
