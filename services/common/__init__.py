"""What the three model hosts share: reading checkpoints, choosing a device, counting memory."""
