"""Turns plans into tokens: input batch, sampler, and the fake runner of simulations."""
