"""The paper's tables and figures again: what was run there, what was printed, and what comes out here."""
