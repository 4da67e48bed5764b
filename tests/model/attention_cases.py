"""What the tests of attention share: rows of documents, inputs, and the slow plain reference."""

import torch
from hypothesis import strategies as st


def rows_of_documents(num_rows, num_positions):
    """(B, T) doc_ids as packing writes them: increasing ids, PAD at the end of some rows."""
    lengths = st.lists(st.integers(1, num_positions), min_size=1, max_size=6)
    row = st.tuples(lengths, st.booleans()).map(lambda x: one_row(*x, num_positions))
    return st.lists(row, min_size=num_rows, max_size=num_rows).map(torch.stack)


def one_row(lengths, is_padded, num_positions):
    ids = torch.arange(len(lengths), dtype=torch.int32)
    row = ids.repeat_interleave(torch.tensor(lengths))[:num_positions]
    rest = -1 if is_padded else len(lengths)
    return torch.nn.functional.pad(row, (0, num_positions - len(row)), value=rest)


def parts_with_pad(num_positions=512, part=128):
    """A short row whose parts of 128 tokens each end in PAD."""
    row = torch.arange(num_positions // part, dtype=torch.int32).repeat_interleave(part)
    for index, size in enumerate([100, 128, 1, 60]):
        row[index * part + size : (index + 1) * part] = -1
    return row


CASES = {
    "ragged": torch.stack([one_row([130, 20, 60], False, 300), one_row([1, 50, 249], False, 300)]),
    "a PAD tail": torch.stack([one_row([90, 20], True, 200), one_row([1, 198], True, 200)]),
    "a row of PAD": torch.stack([one_row([70, 58], False, 128), torch.full((128,), -1).int()]),
    "one document a row": torch.zeros(2, 160, dtype=torch.int32),
    "parts of 128": torch.stack([one_row([128] * 4, False, 512), parts_with_pad()]),
    "short ones alike": torch.stack(
        [one_row([13, 10, 16, 16, 9, 24, 20], True, 120), one_row([24, 15, 23, 12, 46], False, 120)]
    ),
    "equal ones": one_row([16] * 7, True, 120).repeat(2, 1),
    "one position": torch.tensor([[0], [-1]], dtype=torch.int32),
}


def qkv(num_rows, num_positions, seed=0, heads=3, head_dim=16, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, num_rows, heads, num_positions, head_dim)
    return torch.randn(shape, generator=generator).to(device)


def loop_over_documents(q, k, v, doc_ids, causal):
    """The slow plain reference: every document by itself, softmax by hand; a PAD sees itself."""
    out = v.clone()
    for row, ids in enumerate(doc_ids.tolist()):
        for document in set(ids) - {-1}:
            at = [i for i, d in enumerate(ids) if d == document]
            scores = q[row][:, at] @ k[row][:, at].mT / q.shape[-1] ** 0.5
            if causal:
                later = torch.ones(len(at), len(at)).triu(1).bool().to(q.device)
                scores = scores.masked_fill(later, -torch.inf)
            out[row][:, at] = scores.softmax(-1) @ v[row][:, at]
    return out


def result_and_gradients(attend, doc_ids, **shape):
    """Output and the gradients of q, k and v, for one fixed gradient of the output."""
    q, k, v = qkv(*doc_ids.shape, **shape).requires_grad_()
    out = attend(q, k, v)
    weight = qkv(*doc_ids.shape, seed=1, **shape)[0].to(out.dtype)
    return (out, *torch.autograd.grad(out, (q, k, v), weight))
