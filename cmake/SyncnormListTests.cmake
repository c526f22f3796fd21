# Script of syncnorm_add_test: asks PROGRAM for its suites and writes LIST, the ctest entries of each at every rank count.

execute_process(COMMAND "${PROGRAM}" --gtest_list_tests
  OUTPUT_VARIABLE listing RESULT_VARIABLE status ERROR_VARIABLE errors)
if(NOT status EQUAL 0)
  file(REMOVE "${LIST}")
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests failed (${status}): ${errors}")
endif()

# A suite's line starts at the margin and ends with a dot: "Fixture.", "Cases/Fixture." or "Fixture/0.  # TypeParam = ...".
string(REGEX MATCHALL "(^|\n)[A-Za-z0-9_/]+\\." suites "${listing}")
set(fixtures)
foreach(suite IN LISTS suites)
  string(REGEX REPLACE "[\n.]" "" suite "${suite}")
  string(REGEX REPLACE "^[A-Za-z][A-Za-z0-9_]*/([A-Za-z])" "\\1" fixture "${suite}")
  string(REGEX REPLACE "/[0-9]+$" "" fixture "${fixture}")
  list(APPEND fixtures "${fixture}")
  list(APPEND filter_${fixture} "${suite}.*")
endforeach()
list(REMOVE_DUPLICATES fixtures)

set(text "")
foreach(fixture IN LISTS fixtures)
  string(REPLACE ";" ":" filter "${filter_${fixture}}")
  foreach(ranks IN LISTS RANKS)
    set(command "[==[${MPIEXEC}]==]")
    foreach(word IN LISTS FLAGS)
      string(APPEND command " [==[${word}]==]")
    endforeach()
    string(APPEND command " -n ${ranks} [==[${PROGRAM}]==] [==[--gtest_filter=${filter}]==]")
    string(APPEND text "add_test([==[${PREFIX}${fixture}/ranks=${ranks}]==] ${command})\n"
      "set_tests_properties([==[${PREFIX}${fixture}/ranks=${ranks}]==] PROPERTIES PROCESSORS ${ranks} TIMEOUT ${TIMEOUT} "
      "SKIP_RETURN_CODE 77 ENVIRONMENT [==[${ENVIRONMENT}]==] LABELS [==[ranks=${ranks};${LABELS}]==])\n")
  endforeach()
endforeach()
file(WRITE "${LIST}" "${text}")
