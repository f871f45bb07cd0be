"""Conversations: llama.cpp's chat layer, requests, answers, pictures."""
