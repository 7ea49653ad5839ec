"""What plugins of engines share: their own calls, the gate, and what their models may hold beside a checkpoint."""
