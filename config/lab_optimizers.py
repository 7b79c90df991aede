question = 'What does the optimizer buy?'
# Runs each optimizer at rates around its best, with three seeds. Only the two that keep weight decay out of the
# gradient (AdamW and Muon) use it.
#   python bench.py config/lab.py config/lab_optimizers.py --dataset=my_text.txt
# Answer: Muon ends at 2.961, AdamW 3.120, RMSProp 3.122, Adam 3.149, AdaGrad 3.179, momentum 3.239 and SGD 3.432, each
# at its best rate (seed 1). On a toy problem (`python bench.py --what=toy`), SGD reaches the minimum in ten steps at a
# rate of 100. At 1,000, it diverges, and so does momentum.
what = 'compare'
out_dir = 'out/lab_optimizers'
picture = 'learning_rate'
variants = ''
for _name, _decay, _rates in (('adamw', 0.1, '5e-3 1e-2'), ('muon', 0.1, '5e-3 1e-2 2e-2'), ('adam', 0, '5e-3 1e-2'),
                              ('rmsprop', 0, '1e-3 3e-3 1e-2'), ('adagrad', 0, '1e-2 3e-2 0.1'),
                              ('momentum', 0, '0.1 0.3 1 3'), ('sgd', 0, '1 3 5 10')):
    for _rate in _rates.split():
        variants += f'{_name}, rate {_rate}: --optimizer={_name} --weight_decay={_decay} --learning_rate={_rate}\n'
