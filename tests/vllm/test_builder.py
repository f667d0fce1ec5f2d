"""What the metadata builder makes of vLLM's batches, padded ones of CUDA graphs among them."""

from types import SimpleNamespace

import pytest
import torch

from mla_backend_vllm.backend import MetadataBuilder, MLACommonMetadataBuilder

PAGE_SIZE = 32


def build(query_lens, seq_lens, num_tokens=None):
    """The metadata for requests with these lengths; with padding there are `num_tokens` rows."""
    builder = MetadataBuilder.__new__(MetadataBuilder)
    builder.decoder = SimpleNamespace(spec=SimpleNamespace(page_size=PAGE_SIZE), plan=lambda batch: batch)
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    metadata = builder._build_decode(
        block_table_tensor=torch.zeros(len(query_lens), 4, dtype=torch.int32),
        seq_lens_device=torch.tensor(seq_lens, dtype=torch.int32),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=starts,
        query_start_loc_device=starts.clone(),
        num_decode_tokens=sum(query_lens) if num_tokens is None else num_tokens,
        dcp_tot_seq_lens_device=None,
    )
    metadata.plan.check()
    return metadata


@pytest.mark.parametrize(
    "query_lens, seq_lens, num_tokens",
    [
        ([1, 1, 1], [5, 9, 64], None),
        ([4, 4], [8, 40], None),
        # Graph batches: the padding requests are empty, the rows that belong to them exist.
        ([1, 1, 0, 0], [5, 9, 0, 0], 4),
        ([4, 4, 0], [8, 40, 0], 12),
    ],
)
def test_uniform_batches_need_no_query_offsets(query_lens, seq_lens, num_tokens):
    metadata = build(query_lens, seq_lens, num_tokens)
    assert metadata.plan.query_start_loc is None
    assert metadata.plan.max_query_len == max(query_lens)
    assert metadata.plan.page_size == PAGE_SIZE
    assert metadata.path == ("absorbed_decode" if max(query_lens) == 1 else "absorbed_extend")


@pytest.mark.parametrize("query_lens", [[1, 3, 2], [2, 2, 0, 0], [1, 17]])
def test_ragged_batches_carry_their_offsets(query_lens):
    metadata = build(query_lens, [n + 20 for n in query_lens])
    assert metadata.plan.query_start_loc.tolist() == [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    assert metadata.plan.max_query_len == max(query_lens)
    assert metadata.path == "absorbed_extend"


@pytest.mark.parametrize("with_bound", [True, False], ids=["vLLM 0.26", "later"])
def test_no_prompt_loses_its_context(monkeypatch, with_bound):
    context = SimpleNamespace(**({"prefill_tokens_with_context": 7} if with_bound else {}))
    for chunked_context in (context, None):
        metadata = SimpleNamespace(prefill=SimpleNamespace(chunked_context=chunked_context))
        monkeypatch.setattr(MLACommonMetadataBuilder, "build", lambda *_, metadata=metadata: metadata)
        assert MetadataBuilder.build(MetadataBuilder.__new__(MetadataBuilder)) is metadata
    assert getattr(context, "prefill_tokens_with_context", None) is None
