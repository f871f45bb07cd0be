"""Processors, memory, files and terminals: nothing about models."""
