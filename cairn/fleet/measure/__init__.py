"""What a router costs, beside others: the same load through each of them."""
