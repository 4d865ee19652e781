"""What every room builds on: errors, validators, the strict JSON codec, files, locks, interrupts, progress. Imports nothing of Sluice."""
