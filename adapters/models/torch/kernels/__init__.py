"""Operations that a GPU computes in one go: attention, copied rows, exchanges between processes, fused functions."""
