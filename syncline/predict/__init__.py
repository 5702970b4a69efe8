"""What would happen: pure models of a step. Imports nothing of the other rooms, so that methods can plan with it."""
