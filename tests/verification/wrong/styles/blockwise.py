import torch


def flash_attention(q, k, v, causal=False, block=4):
    """Tiled attention with a running maximum and a running sum. q, k, v: (B, H, N, D)."""
    B, H, N, D = q.shape
    M = k.shape[2]
    scale = D**-0.5
    out = torch.zeros(
        B, H, N, v.shape[-1], dtype=torch.float32 if q.dtype != torch.float64 else q.dtype, device=q.device
    )
    row_max = torch.full((B, H, N, 1), float("-inf"), dtype=out.dtype, device=q.device)
    row_sum = torch.zeros((B, H, N, 1), dtype=out.dtype, device=q.device)
    rows = torch.arange(N, device=q.device)[:, None]
    for start in range(0, M, block):
        stop = min(start + block, M)
        s = q.to(out.dtype) @ k[:, :, start:stop].to(out.dtype).transpose(-1, -2) * scale
        if causal:
            cols = torch.arange(start, stop, device=q.device)[None, :]
            s = s.masked_fill(cols > rows, float("-inf"))
        new_max = torch.maximum(row_max, s.amax(dim=-1, keepdim=True))
        p = torch.exp(s - new_max)
        fix = torch.exp(row_max - new_max)
        row_sum = row_sum * fix + p.sum(dim=-1, keepdim=True)
        out = out * fix + p @ v[:, :, start:stop].to(out.dtype)
        row_max = new_max
    return (out / row_sum).to(q.dtype)
