"""Training of SERAC's scope classifier and counterfactual model."""
