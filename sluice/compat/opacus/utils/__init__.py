"""Opacus's helpers that programs import."""
