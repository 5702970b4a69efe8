"""Stage 3: models, data and recipes: what is trained."""
