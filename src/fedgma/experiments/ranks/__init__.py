"""One run on several processes (ranks): where each stands, how they start and meet, and what they agree on."""
