"""Compiled CPU kernels: LeNet and logistic regression."""
