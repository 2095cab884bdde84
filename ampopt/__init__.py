"""PyTorch optimizers with loss scaling, overflow skipping and replay built in."""
