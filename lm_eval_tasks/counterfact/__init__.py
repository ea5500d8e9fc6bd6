"""CounterFact: does an edit of a fact hold in other words, and leave similar facts alone?"""
