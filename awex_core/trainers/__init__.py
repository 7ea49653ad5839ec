"""What trainers share, and ``attach`` for any ``torch.nn.Module``."""
