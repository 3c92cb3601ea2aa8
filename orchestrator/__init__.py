"""The orchestrator: accepts tasks, drives encode -> denoise -> decode, serves results."""
