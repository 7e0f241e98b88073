"""Answers to look at: who said which token of one and when, and a picture of it beside plain generation."""
