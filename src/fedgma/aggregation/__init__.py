"""From updates to one server step: tally, masks, rules, server optimisers. numpy only; torch where tensors come in."""
