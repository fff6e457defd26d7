"""What a run tells: records, lines, events, losses and what an evaluation finds."""
