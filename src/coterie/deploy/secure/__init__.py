"""Secure aggregation: the server learns the weighted sum of the sites' messages, and no single one of them.

Pairwise masks with recovery, after Bonawitz et al. ("Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017), against a server that is curious but follows the protocol. Of the sites i = 1, ..., n of a round,
each with a message x_i in fixed point (`fixed_point`), modulo 2^64:

    s_i, b_i    a key for masks between pairs, and a seed for a mask of its own; new in every round   (`at_site`)
    shares      of s_i and b_i, sealed to each other site; any t of them give the secret back         (`shamir`)
    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(k_ij) - sum_{j < i} PRG(k_ij),  k_ij = k(s_i, s_j)          (`masks`)
    sum x_i     from sum y_i, with the b_i of those who sent a y_i, and the s_i of those who did not  (`at_server`)

A site tells its share of either b_j or s_j, never of both, and once in a round. As t is more than half of the sites,
nobody can collect t shares of both. Masks are made with the keys of one round only.

Flower's own SecAgg+ (1.41) does not serve here, for three reasons. It stretches a mask from a seed of 32 bits
(`pseudo_rand_gen` in `flwr.common.secure_aggregation`), which can be found by trying. A node does not look whether it
is asked for both secrets of another. And it takes lists of arrays with a number of examples, in a workflow of Flower's
own strategies, while our messages are trees whose weights need not be such numbers, and our servers resume.
"""
