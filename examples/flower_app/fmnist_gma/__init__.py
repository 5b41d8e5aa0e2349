"""Gradient masked averaging with FedYogi on Fashion-MNIST, on Flower."""
