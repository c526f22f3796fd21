#pragma once

#include "syncnorm/communicator.h"
#include "syncnorm/convert.h"
#include "syncnorm/data_parallel.h"
#include "syncnorm/environment.h"
#include "syncnorm/error.h"
#include "syncnorm/named_module.h"
#include "syncnorm/process_group.h"
#include "syncnorm/sampler.h"
#include "syncnorm/sharding.h"
#include "syncnorm/state_dict.h"
#include "syncnorm/sync_batch_norm.h"
