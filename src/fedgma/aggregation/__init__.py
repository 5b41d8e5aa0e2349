"""Updates to one step: the tally, the masks, the rules, the server optimisers. numpy; torch if it is handed in."""
