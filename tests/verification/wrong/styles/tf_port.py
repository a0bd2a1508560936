import torch
import torch.nn.functional as F


def scaled_dot_product_attention(q, k, v, mask):
    """Calculate the attention weights.

    q, k, v must have matching leading dimensions (batch_size, num_heads).
    k, v must have matching penultimate dimension.

    Args:
      q: query shape == (..., seq_len_q, depth)
      k: key shape == (..., seq_len_k, depth)
      v: value shape == (..., seq_len_v, depth_v)
      mask: float tensor with shape broadcastable to (..., seq_len_q, seq_len_k): 1 hides a position, 0 keeps it. May be
        None.

    Returns:
      output, attention_weights
    """
    matmul_qk = torch.matmul(q, k.transpose(-1, -2))
    dk = torch.tensor(k.shape[-1], dtype=k.dtype)
    scaled_attention_logits = matmul_qk / torch.sqrt(dk)
    if mask is not None:
        scaled_attention_logits = scaled_attention_logits + (mask * -1e9)
    attention_weights = F.softmax(scaled_attention_logits, dim=-1)
    output = torch.matmul(attention_weights, v)
    return output, attention_weights
