question = 'What does the optimizer buy?'
# Runs each optimizer at rates around its best, with three seeds. Only the two that keep weight decay out of the
# gradient (AdamW and Muon) use it.
#   python bench.py config/lab.py config/lab_optimizers.py --dataset=my_text.txt
# Answer (AMD, seeds 1 and 2): Muon ends at 3.019, AdamW 3.137, Adam 3.141, RMSProp 3.173, AdaGrad 3.215, momentum 3.257
# and SGD 3.533, each at its best rate, with standard deviations of up to 0.03. On a toy problem (`python bench.py
# --what=toy`), SGD reaches the minimum in ten steps at a rate of 100. At 1,000, it diverges, and so does momentum.
what = 'compare'
out_dir = 'out/lab_optimizers'
picture = 'learning_rate'
variants = ''
for _name, _decay, _rates in (('adamw', 0.1, '5e-3 1e-2'), ('muon', 0.1, '5e-3 1e-2 2e-2'), ('adam', 0, '5e-3 1e-2'),
                              ('rmsprop', 0, '1e-3 3e-3 1e-2'), ('adagrad', 0, '1e-2 3e-2 0.1'),
                              ('momentum', 0, '0.1 0.3 1 3'), ('sgd', 0, '1 3 5 10')):
    for _rate in _rates.split():
        variants += f'{_name}, rate {_rate}: --optimizer={_name} --weight_decay={_decay} --learning_rate={_rate}\n'
